"""Edits of a graph of layers: order, redirection, removal, and the journal that undoes them."""
