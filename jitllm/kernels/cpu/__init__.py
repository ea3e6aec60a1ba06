"""The kernels that LLVM generates for the CPU in front of us."""
