"""Attention: position methods turn (q, k, v) into operands; backends turn the operands into the output."""
