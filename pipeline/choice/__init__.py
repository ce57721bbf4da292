"""The choice: objectives, operating points, cost, the recommendation per GPU, and comparisons between revisions."""
