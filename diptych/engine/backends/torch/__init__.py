"""The reference backend in torch: any supported shape, any device."""
