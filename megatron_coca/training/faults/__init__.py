"""Faults inside a training process: preemption, hangs, steps that go wrong. Every module can be tried alone."""
