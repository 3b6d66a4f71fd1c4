"""From the sources of labs and lectures to what students get."""
