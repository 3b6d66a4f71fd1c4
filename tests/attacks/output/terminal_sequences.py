"""Errors full of terminal sequences: titles, cleared screens, links, text that runs backwards.

passes: nothing
status: setup STUDENT_ERROR
"""

# %% replaces="task1_setup"
EVIL = (
    "\x1b]0;OWNED\x07\x1b[2J\x1b[1;1H\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\u202eevil\x9b31m\x00"
)


def setup_distributed():
    print(EVIL)
    print(EVIL, file=sys.stderr)
    raise ValueError(EVIL + "<script>OWNED</script></pre><img src=x onerror=OWNED>")


def cleanup():
    pass
