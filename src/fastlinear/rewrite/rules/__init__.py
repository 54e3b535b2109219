"""Rules: one file a family, each finds what it could rewrite and refuses what it must not."""
