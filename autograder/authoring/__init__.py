"""Builds what students get from the sources of labs and lectures."""
