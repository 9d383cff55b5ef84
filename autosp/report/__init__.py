"""The compile report: what became of every value and operator of a model, and why.

`hook` is told by the backend what it compiles; it costs nothing while nobody listens. `build` turns an annotated graph
into `records`, which `text` prints, `page` draws, and JSON carries.
"""
