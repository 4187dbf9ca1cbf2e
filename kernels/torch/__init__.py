"""Operations by torch's own kernels, where no others can be."""
