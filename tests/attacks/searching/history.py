"""In, Out, the history file and the modules that are loaded: has a check left something there?

passes: nothing
"""


# %% put="after setup"
def look():
    words = ("expected", "PASS", "referee.close", "draw_setup(")
    for text in [*In, *map(str, Out.values())]:
        for word in words:
            if word in text and "words =" not in text:
                print("LEAKED: history:", word)
    import sqlite3

    path = get_ipython().history_manager.hist_file
    with contextlib.suppress(Exception):
        for (source,) in sqlite3.connect(str(path)).execute("select source_raw from history"):
            if "solution" in source and "words =" not in source:
                print("LEAKED: another session's history")


look()
