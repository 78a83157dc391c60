"""Tests of one running `disagg serve`: one worker runs them, in the order of their files."""
