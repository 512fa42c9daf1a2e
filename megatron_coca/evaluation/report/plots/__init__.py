"""Plots of a report: figures in two layouts, panels of lines with labels at their ends, and heat maps."""
