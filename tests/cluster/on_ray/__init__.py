"""Tests of clusters on one private Ray: one worker runs them."""
