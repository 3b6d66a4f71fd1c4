"""Joins a second time and sends frames under another session's number: both lead nowhere.

base: reference
passes: everything
"""

# %% put="after task7_ddp"
_Reference = DDP


class DDP(_Reference):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__(module, bucket_cap_mb)
        if dist.get_backend() == "emulated":
            client = module[0].channel
            with contextlib.suppress(RuntimeError):
                client.call({"t": "join"})
                print("LEAKED: joined twice")
            number, client.session = client.session, client.session - 1
            for header in (
                {"t": "wait", "key": "x"},
                {"t": "compute", "ev": []},
                {"t": "nonsense"},
            ):
                client.post(header)
            client.session = number
