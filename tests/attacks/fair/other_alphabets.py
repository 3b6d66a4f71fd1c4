"""Right, with names and comments in other alphabets, and emoji.

base: reference
"""

# %% put="after imports"
größe, 数, имя = 1, 2, "🙂"
print("✓", größe + 数, имя)  # кириллица, 漢字
