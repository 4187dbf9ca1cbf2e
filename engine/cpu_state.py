"""What of the C++ kernels this machine has, for people who ask before a model is loaded. Imports no torch."""

from gristmill.kernels.dispatch import CpuState as CpuState
from gristmill.kernels.dispatch import load_cpu_state as load_cpu_state
