"""Kernels of recurrent layers: convolutions, state spaces, the gated delta rule. States are read and written in place
by slot."""
