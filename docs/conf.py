"""How Sphinx builds the site, from this folder, tutorials/ and the library; nothing comes from a network."""

import os
import sys
import warnings
from pathlib import Path

import pypandoc
from sphinx.deprecation import RemovedInSphinx10Warning

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]
# nbsphinx calls pandoc by name; the wheel brings it but does not put it on the path.
os.environ["PATH"] = f"{Path(pypandoc.get_pandoc_path()).parent}{os.pathsep}{os.environ.get('PATH', '')}"

# sphinx-autodoc-typehints 3.6.1, the newest for Python 3.11, calls a method that Sphinx 10 will not have; both are
# pinned.
warnings.filterwarnings("ignore", category=RemovedInSphinx10Warning)
# The page on collectives documents this deprecated alias, so the build looks at it.
warnings.filterwarnings("ignore", message="reduce_op is deprecated")

import torchdist_ref  # noqa: E402

project = "torchdist_ref"
author = "The torchdist_ref developers"
project_copyright = "2026, the torchdist_ref developers"
version = release = torchdist_ref.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.intersphinx",
    "sphinx_autodoc_typehints",
    "myst_parser",
    "nbsphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "offline_math",
    "foreign_names",
    "own_names",
    "site_directives",
    "torch_names",
    "each_rank",
    "speed",
    "measured",
    "traces",
    "profile_pictures",
    "player",
    "explorer",
    "reduction_trees",
    "collective_pages",
    "acid_table",
    "curriculum",
    "idea_pictures",
    "error_index",
    "head_tags",
    "page_python",
    "workbench",
    "hang_page",
    "notebook_pages",
    "lean_pages",
]
exclude_patterns = ["_build", "paper", "_generated", "changes", "_templates", "_inventories", "**.ipynb_checkpoints"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
default_role = "quoted"
nitpicky = True
# A parameter specification of `typing`, which has no page, and the types of arguments that tests pass.
nitpick_ignore = [("py:class", "_P"), ("py:class", "Clock"), ("py:class", "RankServer")]
# A function in this file is a configuration value that Sphinx cannot keep between builds; it says so each time.
suppress_warnings = ["config.cache"]

intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(HERE / "_inventories" / "python-3.11.inv")),
    "torch": ("https://pytorch.org/docs/stable/", str(HERE / "_inventories" / "torch.inv")),
}

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
always_use_bars_union = True
typehints_use_signature = True
typehints_defaults = "comma"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Differentiable", "Elsewhere"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

# The tutorials were executed by docs/run_tutorials.py, once, before Sphinx started.
nbsphinx_execute = "never"
nbsphinx_requirejs_path = ""
nbsphinx_prolog = """
.. lesson:: {{ env.docname.split('/')[-1] }}

.. note::

   This page is a notebook that ran on real ranks when the site was built:
   :download:`download it with its data <{{ env.docname.split('/')[-1] }}.zip>`. What it needs:
   ``pip install "torchdist_ref[notebook]"``, after the CPU build of torch (:doc:`/tutorials/index`).
"""

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.prompt) > div.highlight pre"
copybutton_exclude = ".linenos, .gp, .go"

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "torchdist_ref"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css", "player.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("site.js", "schedules.js", "player.js")]
# The address at which the site is published, and a template of the address at which a page can be edited.
html_baseurl = os.environ.get("TORCHDIST_REF_SITE_URL", "")
EDIT_URL = os.environ.get("TORCHDIST_REF_EDIT_URL", "")
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "torchdist_ref"},
    "show_toc_level": 2,
    "navigation_with_keys": True,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "secondary_sidebar_items": ["page-toc", "edit-this-page"] if EDIT_URL else ["page-toc"],
    "use_edit_page_button": bool(EDIT_URL),
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
if html_baseurl:
    # A published site has one folder for each version. Beside them lies the list that the switcher reads.
    root, _, name = html_baseurl.rstrip("/").rpartition("/")
    html_theme_options |= {
        "switcher": {"json_url": f"{root}/switcher.json", "version_match": name},
        "check_switcher": False,
        "navbar_end": ["version-switcher", "theme-switcher"],
    }
html_context = {"default_mode": "auto", "edit_page_url_template": EDIT_URL}
