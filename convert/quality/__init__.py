"""What a converted weight loses, and how to lose less of it: searches for scales, and what they cost."""
