"""Draws its tracebacks itself, with what nobody would expect in one.

passes: nothing
"""


# %% replaces="task1_setup"
class Drawn(Exception):
    def _render_traceback_(self):
        return ["\x1b[31m✓ 5/5\x1b[0m", "<script>OWNED</script>", "\r" * 1000]

    def __str__(self):
        return "\ud800 not text </script>"


def setup_distributed():
    raise Drawn
