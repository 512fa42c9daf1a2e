"""The CUDA path without a GPU: a stand-in device that counts, and scenarios with budgets; see docs/pretend.md."""
