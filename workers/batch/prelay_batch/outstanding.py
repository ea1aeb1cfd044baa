"""The jobs of a runner that are in the queue."""

from __future__ import annotations

from collections.abc import Iterator

from .life import Line


class Outstanding:
    """Which line and choice a job is of. A job that is not in it is nobody's: of an earlier try, or over."""

    def __init__(self, batch_id: str) -> None:
        self.tokens = 0  # of their prompts
        self._batch_id = batch_id
        self._jobs: dict[str, tuple[Line, int]] = {}

    def __repr__(self) -> str:
        return f"Outstanding({len(self)} jobs)"

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._jobs))

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def of(self, job: str) -> tuple[Line, int]:
        return self._jobs[job]

    def lines(self) -> list[Line]:
        """Each line that has a job here, in the order in which they came."""
        return list(dict.fromkeys(line for line, _ in self._jobs.values()))

    def add(self, line: Line) -> None:
        """The jobs of this try of a line."""
        for job, part in zip(line.job_ids(self._batch_id), line.parts, strict=True):
            self._jobs[job] = line, part.choice
            self.tokens += len(part.prompt_ids)

    def over(self, job: str) -> None:
        """This job has ended."""
        line, choice = self._jobs.pop(job)
        self.tokens -= len(line.parts[choice].prompt_ids)

    def drop(self, line: Line) -> list[str]:
        """Take out what is left of a line; return the jobs."""
        jobs = [job for job in line.job_ids(self._batch_id) if job in self._jobs]
        for job in jobs:
            self.over(job)
        return jobs

    def silent(self, before: float) -> list[str]:
        """Jobs of lines that were not heard of since then, seconds."""
        return [job for job, (line, _) in self._jobs.items() if line.looked < before]
