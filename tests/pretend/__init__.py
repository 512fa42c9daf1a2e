"""The CUDA path without a GPU: a stand-in device that counts, and scenarios with budgets; see tests/pretend."""
