"""Parts of every measurement: alternated rounds, their medians and ratios, and the files that hold the results."""
