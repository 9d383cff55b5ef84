"""Memory and time of a training step before it runs, from the graphs that would run.

`trace` compiles one step for one rank under fake tensors and keeps the partitioned forward and backward graphs;
`program` turns each into buffers and work with symbolic sizes; `walk` finds the moments of most memory; `estimate`
puts weights, gradients and optimizer beside them and extends few layers to many; `search` finds the longest sequence.
"""
