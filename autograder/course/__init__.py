"""A course's folder and key, and the settings in course.toml."""
