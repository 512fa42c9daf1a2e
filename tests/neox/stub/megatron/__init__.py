"""What the plugin relies on of GPT-NeoX, written for tests: names and parameters are its, what they do is the least
that the plugin's work shows on.
"""
