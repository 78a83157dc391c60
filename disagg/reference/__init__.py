"""Computes reference answers with engines that run in one process, and compares a cluster's answers with them."""
