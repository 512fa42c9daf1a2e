"""Attention: position methods turn (q, k, v) into operands, backends turn operands into the output."""
