"""Attention as the papers write it, in float64. The tests compare every other path of this package with it.

It imports nothing of the production code, and its modules do not import each other: `dense` scores every pair of a
query and a key, `frequencies` has the rotary frequencies and their extensions, and `clex` the learned ones.
"""
