"""Forgets the limit of the queue: the source is read to its end while the first batch is used.

loses: prof_prefetch
"""


# %% replaces="task4_prefetch"
def prefetch(batches, depth):
    ready = queue.Queue()
    end, stopped = object(), threading.Event()

    def put(item):
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.05)
            except queue.Full:
                pass
        raise GeneratorExit

    def fill():
        try:
            for batch in batches:
                put((batch, None))
            put((end, None))
        except GeneratorExit:
            pass
        except Exception as error:
            put((end, error))

    threading.Thread(target=fill, daemon=True).start()
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            if batch is end:
                return
            yield batch
    finally:
        stopped.set()
