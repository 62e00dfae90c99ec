"""The pure schedule: which wave enters, which nodes die, which commit. No tensors, ranks or clocks.

The words, one a thing, in code, docs and logs:

stage       contiguous target layers [lo, hi), numbered 0..n-1
boundary k  the hidden state after k decoder layers, before the final norm
tap         a boundary that the speculation module reads
position    index of a token in its text, prompt included
depth       how many stages a position has completed, 0..n
cycle       one tick: each stage that has work forwards one wave
node        one token in flight: request, position, parent node, KV row
wave        the nodes that enter stage 0 together and travel together
draft       a proposed token; accepted, rejected and flushed are counted apart
commit      a token becomes part of the text

acceptance = accepted / (accepted + rejected); EAL = n * committed / cycles.
"""
