"""Configuration of the documentation site: `make docs`."""

project = "Diptych"
copyright = "the Diptych authors"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "Diptych"
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["myst.xref_missing"]  # links to files beside the site; tests/documents checks every link
