"""Kernels of recurrent layers: convolutions, state spaces, the gated delta rule. The kernels read and write states in
their slots, in place."""
