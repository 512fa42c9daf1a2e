"""What attention does with distance, measured on a checkpoint (section 2 and appendix D of the CoCA paper)."""
