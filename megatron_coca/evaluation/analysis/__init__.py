"""`evaluate.py analyse`: initial angles, rotary borders, decay and entropy of a checkpoint's attention."""
