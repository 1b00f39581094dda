"""What a running BlendKV tells about itself: metrics in OpenMetrics form."""
