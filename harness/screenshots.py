"""Make the pictures of the page for the documentation: `python -m harness.screenshots docs/how-to`.

It serves the page with sample jobs, opens it in Chromium, and writes PNG files of at most MAX_BYTES.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, async_playwright

from harness.sample_jobs import NAMESPACE, SampleJobs, sample
from regroup_cli.page.server import Page, serve
from regroup_cli.page.sources import Key
from regroup_client.errors import JobError
from regroup_client.jobs import Jobs
from regroup_client.views import JobView

MAX_BYTES = 120_000
JOB = f"/jobs/{NAMESPACE}/resnet50"
Picture = tuple[str, int, int, Literal["light", "dark"]]
PICTURES: dict[str, Picture] = {
    "page-job.png": (JOB, 1200, 1000, "light"),
    "page-jobs.png": ("/", 1000, 420, "light"),
    "page-narrow.png": (JOB, 400, 820, "dark"),
}
"""Name of a picture -> path, width, height, colour scheme."""


class SampleSource:
    """Implements Source with sample jobs."""

    title = f"namespace {NAMESPACE}"
    is_local = False
    has_namespaces = False

    def __init__(self, jobs: SampleJobs) -> None:
        self.jobs = jobs

    def all(self) -> list[JobView]:
        return self.jobs.all()

    def key(self, view: JobView) -> Key:
        return Key(view.namespace, view.name)

    def find(self, key: Key) -> tuple[Jobs, str]:
        if key.place != NAMESPACE:
            raise JobError(f"There is no namespace {key.place}.")
        return self.jobs, key.name


def chromium() -> str | None:
    """Return the path of Debian's Chromium, or None if it is not installed."""
    return shutil.which("chromium")


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Yield a Chromium that runs without a screen."""
    async with async_playwright() as programs:
        # As root there is no sandbox: only the page of this process is opened in it.
        started = await programs.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            await started.close()


@asynccontextmanager
async def served(jobs: SampleJobs) -> AsyncIterator[Page]:
    """Serve the page with sample jobs."""
    serving = await serve(SampleSource(jobs), 0, lambda _: None)
    try:
        yield serving.page
    finally:
        await serving.close()


async def take(directory: Path) -> None:
    """Write the pictures."""
    async with browser() as started, served(sample()) as page:
        for name, (path, width, height, scheme) in PICTURES.items():
            context = await started.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab = await context.new_page()
            await tab.goto(page.address(path))
            await tab.wait_for_url(lambda url: "code" not in url)
            await tab.wait_for_load_state("networkidle")
            await tab.screenshot(path=directory / name)
            await context.close()
            print(f"{directory / name}: {(directory / name).stat().st_size} bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures, and return 1 if one is too large or there is no browser."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.screenshots", description="Write the pictures of the page."
    )
    parser.add_argument("directory", type=Path)
    args = parser.parse_args(argv)
    if chromium() is None:
        print("Chromium is missing: apt-get install chromium", file=sys.stderr)
        return 1
    asyncio.run(take(args.directory))
    large = [name for name in PICTURES if (args.directory / name).stat().st_size > MAX_BYTES]
    for name in large:
        print(f"{name} is larger than {MAX_BYTES} bytes.", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
