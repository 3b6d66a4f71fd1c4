"""Calls next() on the source itself; a list is none.

loses: prof_prefetch_ends
says: prof_prefetch_ends with a list of
"""


# %% replaces="task4_prefetch"
def prefetch(batches: Iterable, depth: int) -> Iterator:
    ready = queue.Queue(maxsize=depth)
    gone = threading.Event()

    def put(item) -> bool:
        while not gone.is_set():
            try:
                ready.put(item, timeout=0.02)
                return True
            except queue.Full:
                pass
        return False

    def work() -> None:
        try:
            end = object()
            while (batch := next(batches, end)) is not end:
                if not put(("batch", batch)):
                    return
        except BaseException as error:
            put(("error", error))
        else:
            put(("end", None))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise item
            yield item
    finally:
        gone.set()
