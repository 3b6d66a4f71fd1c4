"""JupyterLab as `make lab` opens it: with the front page, and figures that fit a dark theme."""

from pathlib import Path

c = get_config()  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
c.LabApp.default_url = "/lab/tree/Course.md"
c.LabApp.custom_css = True
c.ServerApp.tornado_settings = {"static_custom_path": [str(Path(__file__).parent / "custom")]}
