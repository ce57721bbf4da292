"""A plugin of AIPerf (https://github.com/ai-dynamo/aiperf): see strategy.py. It runs in AIPerf's processes alone."""
