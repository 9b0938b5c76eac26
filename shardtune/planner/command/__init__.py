"""`shardtune plan`: its options, its text and its tables."""
