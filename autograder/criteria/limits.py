"""What one submission may use. A lab sets the limits; a course may change them in `course.toml`."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one submission may use; sizes in bytes, times in seconds.

    Attributes:
        wall_s: time of the whole notebook; checks that it has not reached by then are NOT_RUN.
        cpu_seconds: processor time of each process.
        memory_bytes: private writable memory of each process (RLIMIT_DATA). Not enforced where
            there is a GPU, because CUDA reserves far more address space than it uses.
        box_memory_bytes: memory of all processes of the box, shared pages counted once.
        gpu_memory_bytes: memory of all GPUs that the processes of the box hold together.
        num_processes: processes and threads of the whole box.
        file_bytes: size of any one file.
        tmp_bytes: size of /tmp, which holds the working folder and the home.
        shm_bytes: size of /dev/shm.
        num_open_files: open files of each process.
        output_bytes: what the cells of the notebook display and print, all together.
    """

    wall_s: int = 900
    cpu_seconds: int = 900
    memory_bytes: int = 4 * GIB
    box_memory_bytes: int = 8 * GIB
    gpu_memory_bytes: int = 32 * GIB
    num_processes: int = 1024
    file_bytes: int = 256 * MIB
    tmp_bytes: int = 512 * MIB
    shm_bytes: int = 512 * MIB
    num_open_files: int = 4096
    output_bytes: int = 64 * MIB

    def with_gpus(self, num_ranks: int) -> Limits:
        """These limits plus what CUDA needs on a machine with GPUs: memory and threads per rank."""
        return replace(
            self,
            box_memory_bytes=self.box_memory_bytes + 3 * GIB * num_ranks,
            num_processes=self.num_processes + 256 * num_ranks,
        )
