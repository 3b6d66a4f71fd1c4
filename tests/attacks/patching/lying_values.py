"""Numbers, booleans and lists of subclasses that equal whatever they are compared with.

base: reference
passes: everything but setup, sampler_partition, sampler_tail, sampler_epoch, gradients_in_sync
"""


# %% replaces="task1_setup"
class Number(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = int.__hash__


def setup_distributed():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Number(7), Number(7), torch.device("cpu")


def cleanup():
    pass


# %% replaces="task3_sampler"
class ShardSampler(Sampler):
    def __init__(self, num_samples, *arguments, **options):
        self.num_samples = num_samples

    def set_epoch(self, epoch):
        pass

    def __len__(self):
        return Number(3)

    def __iter__(self):
        return iter([Number(1), Number(1), Number(1)])


# %% replaces="task6_in_sync"
class Always(torch.Tensor):
    def __bool__(self):
        return True


def gradients_in_sync(model, tol=1e-6):
    return torch.ones(()).as_subclass(Always)
