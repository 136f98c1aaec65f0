"""Configuration of the documentation: `make docs`. Builds without a network and without a GPU."""

import os
import sys
from pathlib import Path

# Before autodoc imports the package: a build must not look for GPUs.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))  # docstrings.py

from shardops.version import __version__

project = "shardops"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
]

html_theme = "sphinx_book_theme"
html_title = f"shardops {release}"
html_static_path = ["_static"]
html_css_files = ["shardops.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
}

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

default_role = "code"  # docstrings write names in single backticks, as Markdown does
highlight_language = "text"  # equations
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80  # else one argument a line
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_param = False  # "lhs, rhs: ..." stays one entry
napoleon_custom_sections = [("Attributes", "params_style")]
