"""What mkdocs does besides rendering pages (`hooks` of mkdocs.yml): it puts the page of every evaluated case in.

The page is not committed: it is long, and the measurements it is made from are not part of the repository. Where
TRAINCAST_DATA names their folder it is made (some minutes); elsewhere it says how.
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

ACCURACY = "evidence/accuracy.md"
"""The page, relative to docs/."""
MISSING = """# Every case

This page lists every evaluated case with its measured and predicted time. It is made from public measurements, which
are not part of the repository. Build the site with them:

```sh
TRAINCAST_DATA=DIR mkdocs build
```

or print the page alone with `python scripts/write_accuracy.py --data DIR`. The pages of [evidence](index.md) have the
final tables.
"""


@cache
def accuracy_text(folder: str) -> str:
    """The page from the measurements in a folder; without one, how to make it."""
    if not folder:
        return MISSING
    scripts = Path(__file__).parent
    sys.path.insert(0, str(scripts))  # the script imports what scripts share
    return str(runpy.run_path(str(scripts / "write_accuracy.py"))["page_text"](Path(folder)))


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated page to the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, ACCURACY, content=accuracy_text(os.environ.get("TRAINCAST_DATA", ""))))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Gives the theme's search dialog the name that screen readers say."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
