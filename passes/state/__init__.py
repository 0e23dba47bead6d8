"""What a masked layer holds, when its mask is built, and the scores that move it."""
