"""Operations by our own C++ kernels (src/), on x86 with AVX2 or better."""
