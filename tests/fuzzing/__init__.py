"""A differential fuzzer: drawn training programs do under the engine, on 1 to 4 ranks, what plain PyTorch does on one process.

description   a model, a program and a configuration as plain data; which features they use
drawing       descriptions from a seeded generator
model         the module that a description asks for
running       its program, step by step, and what is seen on the way
plain         on one process, by plain PyTorch, with the batches of all ranks
sharded       on one rank of the engine
trainer       the same under a Trainer
workers       processes that execute descriptions for as long as a run lasts
comparing     what both saw, held against each other with fixed tolerances
refusals      messages with which the engine may refuse a description
known         defects that are not mended yet: what is left out of the draws, and the smallest program that shows each
checking      one description from end to end
shrinking     the smallest description that still fails
script        a failing description as a script of its own
"""
