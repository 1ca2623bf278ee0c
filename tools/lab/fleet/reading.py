"""What the figures say, in words: written by hand after they were there."""

READING = """\
## What the runs say

In the cells that were run with the gate `pack` keeps every target that any rival keeps, and takes half of round robin's
node-seconds in quiet times. Where it is missed:

- Bursts. All cells behind are the code trace's, where every rival gets 70 to 92 % as well: its bursts are more than the
  fleet can do for a while. `pack` is 0 to 2 points behind in the mean: a node that is filled to half of the target
  when a burst comes has that much to do first. Where least response reaches 95 %, `pack` does as well.
- Node-seconds (0.73 of round robin for 0.70) and throughput (0.95 of the best rival's for 0.98) in the worst cell of
  the bursts: the cause was not looked for.
- Without a gate no mixed policy keeps up with separate nodes once training takes much of the time: a request waits for
  whole backwards. That is LeMix's own rule, and why training belongs behind a gate.

`printed` is the paper's formula: its sign prefers longer responses, so nearly everything goes to one node.
"""
