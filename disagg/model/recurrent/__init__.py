"""Recurrent states: convolutions, state space models, linear attention."""
