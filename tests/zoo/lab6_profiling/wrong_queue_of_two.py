"""A queue of two, whatever the depth.

loses: prof_prefetch
"""


# %% replaces="task4_prefetch"
def prefetch(batches: Iterable, depth: int) -> Iterator:
    """Yields the batches, while a thread makes `depth` more of them ahead."""
    ready: queue.Queue = queue.Queue(maxsize=2)
    stopped = threading.Event()

    def put(what: str, thing: object) -> bool:
        while not stopped.is_set():
            try:
                ready.put((what, thing), timeout=0.05)
                return True
            except queue.Full:
                pass
        return False

    def fill() -> None:
        try:
            for batch in batches:
                if not put("batch", batch):
                    return  # nobody wants it any more
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while True:
            what, thing = ready.get()
            if what == "end":
                return
            if what == "error":
                raise thing
            yield thing
    finally:
        stopped.set()
        thread.join()
