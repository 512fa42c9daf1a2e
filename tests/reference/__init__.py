"""Attention as the papers write it, in float64: what every other path of this package is tested against.

It imports nothing of the production code, and its modules nothing of each other: `dense` scores every pair of a query
and a key, `frequencies` has the rotary frequencies and their extensions, `clex` the learned ones.
"""
